"""The tiny reasoning model that ships with the project: `python -m pipeline.demo_verifier`."""
