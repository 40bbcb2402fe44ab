"""The prefill worker: computes prompts and hands their state to decode workers."""
