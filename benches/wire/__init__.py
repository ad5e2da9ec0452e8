"""The wire door compared with InfiniStore's own server: malformed traffic, throughput, kills."""
