"""Random numbers that a forward draws by functions of torch: by sample, whatever the plan.

draws = SampleDraws(model)                                          # once, of the whole model
with scope(seed=0, step=7, first_sample=16, samples=4, draws=draws):
    model(inputs)                                                   # torch.randn_like, F.dropout, …
"""
