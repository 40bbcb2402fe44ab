"""The Grafana dashboards as code. Knows metric names and Grafana's JSON; not where they are deployed."""
