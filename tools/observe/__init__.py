"""A local cluster under load, watched by a real Prometheus. Knows commands and queries; not how figures come about."""
