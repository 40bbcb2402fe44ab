"""Training of `dspark-tiny`, the small checkpoint that ships with the repository."""
