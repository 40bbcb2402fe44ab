"""Stubs generated from protos/dspark/v1 by `make stubs`; committed, and checked for drift by the gate."""
