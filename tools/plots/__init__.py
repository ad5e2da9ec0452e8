"""Plots for the documentation, drawn from its own figures."""
