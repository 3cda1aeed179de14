"""How Algorithm 2 is run: its phases, and who runs them."""
