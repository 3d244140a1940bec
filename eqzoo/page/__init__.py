"""A web page of a network for colleagues: one file that classifies images in a browser."""

from .writing import write_page

__all__ = ["write_page"]
