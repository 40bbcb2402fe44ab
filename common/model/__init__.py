"""DeepSeek-V4 and its DSpark drafter as functions of rows, positions and caches. Knows no request and no wire."""
