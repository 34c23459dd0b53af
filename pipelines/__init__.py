"""The stages that make artifacts, on Ray Data and Ray Train."""
