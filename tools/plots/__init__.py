"""Pictures for the documentation, drawn from the figures that it gives."""
