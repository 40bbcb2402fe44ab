"""Cache regions, the pools that store them and the pages and slots that requests hold. Knows rows and positions, no model."""
