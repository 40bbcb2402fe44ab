"""The decode worker: takes state over from prefill workers and generates tokens for routers."""
