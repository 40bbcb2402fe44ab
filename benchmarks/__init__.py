"""What the system is worth, measured: prompts, timers, tables. Knows the SDK and processes; nothing of their insides."""
