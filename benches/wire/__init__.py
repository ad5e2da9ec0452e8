"""The wire door beside InfiniStore's own server: malformed traffic, throughput, kills."""
