"""The long-lived Ray processes: tiers, the cell that places and drives them, the HTTP ingress."""
