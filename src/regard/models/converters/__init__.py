"""Other libraries' layouts of the same models: names, shapes and configurations, both ways."""
