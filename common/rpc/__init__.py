"""How services speak gRPC: options, errors as statuses, health, and messages to and from `common.types`.

Knows the wire; never sees a tensor, a page or a request's state.
"""
