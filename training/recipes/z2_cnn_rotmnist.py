"""z2_cnn on rotated MNIST."""

from eqzoo.engine import Recipe

recipe = Recipe(model="z2_cnn", dataset="rotmnist", epochs=100)
