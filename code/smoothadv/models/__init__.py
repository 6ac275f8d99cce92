"""Models: what their names mean, how they are stored, and how they are loaded."""
