"""kvgate: one OpenAI-compatible front for several engines that share GPUs and sleep when idle.

A request's way:   front -> guard -> proxy -> router -> lane -> engine
A model's life:    idle -> sleep -> control -> engine;  room decides whether it may wake

    app        the commands            launch    from flags to a running gate     serve     what starts and stops, in which order
    config     models.yaml             sections  strict reading of YAML           errors    every error, as one tree
    front      the ASGI app            guard     keys, Host, Origin               protocol  bounds on a request's head
    manage     management endpoints    proxy     one request, passed on           router    backends by name, health, reload
    lane       admission to an engine  sleep     one state machine a model        idle      puts idle models to sleep
    control    an engine's endpoints   room      waking where it fits             engines   processes: in order, watched
    launcher   how one is started      traffic   what is counted                  metrics   all numbers as one table
    openapi    what is answered where  prewarm   keys, straight to kvd            preflight kvdoctor's warnings at the start
    publish    the stats segment       ask       asking a running gate            show      what commands print
    warden     runs beside each engine, and ends it when the gate is gone
    enter      becomes an engine in a tmux session, with its environment
"""
