"""The parts of `make gpu-check`: each measures something on a GPU against a ceiling of its own."""
