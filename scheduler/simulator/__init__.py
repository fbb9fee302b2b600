"""Replay of a trace in virtual time, through the same core that serves: `harness replay`.

    trace      a file's rows: arrival, prompt, output, tenant
    profiles   an engine in figures, measured or derived
    workload   rows -> the core's requests: tiers and tenants dealt, lengths fitted, time scaled to a load
    replay     requests through planner and step machine -> one record per request
    results    records -> attainment, goodput, value, latencies, shares
    report     results -> JSON and a table
    charts     results -> a page of charts

`scheduler/bound.py` says what no policy could exceed.
"""
