"""Building blocks shared by models: linear maps, rotary tables, attention, the gated MLP."""
