"""How a token is drawn from logits. Knows rows, seeds and positions; knows no request and no model."""
