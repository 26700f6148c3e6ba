"""The lab: attention in the browser, for any model, offline. `regard lab` starts it.

A server on this machine alone answers the page: it computes only the rows that are looked at, queues and cancels work,
and takes nothing from the page but texts, images, numbers and names of models that the command line gave it.
"""
