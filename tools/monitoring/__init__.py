"""What an operator looks at, in the programs that operators use: a browser, Prometheus, the dashboard's queries."""
