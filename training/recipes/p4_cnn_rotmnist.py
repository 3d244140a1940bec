"""p4_cnn on rotated MNIST."""

from eqzoo.engine import Recipe

recipe = Recipe(model="p4_cnn", dataset="rotmnist", epochs=100)
