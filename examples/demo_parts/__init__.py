"""The parts of the demo: what it does beside training, and the page that it leaves."""
