"""Scripts that make dataset folders from images. Each has a --help."""
