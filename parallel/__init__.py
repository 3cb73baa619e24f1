"""How a model meets a mesh."""
