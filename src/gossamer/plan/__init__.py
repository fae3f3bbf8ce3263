"""The planner: measure a cluster, predict every method on it, recommend one, and verify the prediction.

==================  ========================================================================================
``probe``           measures a cluster with real workers
``cluster_spec``    the cluster that a plan is for; ``cluster_file`` reads and writes it, ``what_if`` changes it
``runtime_model``   predicts step times: ``closed_form``, or ``replay`` in the virtual cluster
``predict``         predicts one candidate: a method with its settings over a topology
``recommend``       ranks all candidates and recommends one; ``plot`` draws them over workers and bandwidth
``verify``          trains with the best candidates and compares
``auto``            probes, plans and uses the winner, for ``--method auto``
==================  ========================================================================================
"""
