"""Figures of results, from nothing but their JSON.

Reading order: `form` (how all of them look), one module for each kind of figure
(`speed_up`, `acceptance`, `parts`, `modes`, `load`), and `picture`, which puts together
those of one run. All need the extra `bench`, which brings matplotlib.
"""
