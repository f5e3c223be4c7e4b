"""A module that lies beside a script."""

import numpy as np


def plot(values):
    print("plotted", np.asarray(values).round(3).tolist())
