"""The paper's Adam, batch, weight decay and dropout; the learning rate and the length are those of p4_cnn here."""

from eqzoo.engine import Recipe

recipe = Recipe(model="p4_alpha_f_cnn", dataset="rotmnist", epochs=150, lr=5e-3)
