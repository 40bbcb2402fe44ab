"""How quickly each transfer engine moves bytes between two machines, or two processes of one, and what limits it."""
