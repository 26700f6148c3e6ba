"""Closed forms of bare descriptions: `cost(Attention(...), tokens=..., dim=...)`, and of attentions inside a trace."""
