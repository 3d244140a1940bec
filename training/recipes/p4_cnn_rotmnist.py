"""The paper's Adam, batch, weight decay and dropout; the learning rate and the length are ours.

The learning rate falls along a cosine from 5e-3 in 150 epochs. A first recipe, the paper's 1e-3 in 100 epochs, had
2.10 % validation and 2.41 % test error; this one was tried after that, and has the lower validation error.
"""

from eqzoo.engine import Recipe

recipe = Recipe(model="p4_cnn", dataset="rotmnist", epochs=150, lr=5e-3)
