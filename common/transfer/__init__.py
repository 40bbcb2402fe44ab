"""Moving a request's cache rows between two processes: what to move, where to, and the engines that move it.

Knows rows, bytes and the messages that describe them; never computes a row.
"""
