"""`kvoffload doctor`: what was built and what this machine gives, with advice where something is off."""
