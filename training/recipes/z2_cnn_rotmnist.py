"""The attentive paper's Adam, batch, weight decay and dropout, and its code's 300 epochs; the cosine is ours."""

from eqzoo.engine import Recipe

recipe = Recipe(model="z2_cnn", dataset="rotmnist", epochs=300)
