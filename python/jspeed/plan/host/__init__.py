"""Tables in the host's memory (:mod:`jspeed.run.compute.host_tables`) in a plan: whether they are
there, what they take of it, and what a step waits for."""
