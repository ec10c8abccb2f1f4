"""Miniatures of big verifiers (python -m pipeline.twins)."""
