"""The package accelerate, with an error that says how to install it."""

try:
    import accelerate
except ImportError as error:
    raise ImportError(f"training needs accelerate: pip install 'eqzoo[train]' ({error})") from error

__all__ = ["accelerate"]
