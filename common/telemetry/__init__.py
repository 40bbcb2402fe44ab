"""What the system says of itself while it runs. Knows formats and names; never the model."""
