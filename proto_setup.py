import pickle, time
import numpy as np
from tensile_jax.device_profiles import load_profile
from tensile_jax.plan.search.candidates import Candidates, _PRICES
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.search.swaps import SMALLEST, state_that_may_stay_out
from tensile_jax.plan.search.segmentation import _candidate_boundaries
from tensile_jax.plan.analysis.absence import stored_unless_swapped
from tensile_jax.plan.search.condensed import condense
def setup(name, profile="h200"):
    g=pickle.load(open(f"/tmp/i13/{name}.pkl","rb"))
    c=Candidates(order(g), load_profile(profile), state_may_stay_out=False)
    t0=time.time()
    prices=(4.0,0.6,0.36,0.165,0.05,0.01)
    rets=[c._retention(p)[0] for p in prices]
    count=len(g.operators)
    kept=np.zeros(len(g.tensors),bool)
    for r in rets:
        e=r.ends; 
        turn=int(stored_unless_swapped(r).argmax())
        k=(c.liveness.begins<turn)&(e>=turn)
        d=np.zeros(len(kept),bool); d[list(r.dropped)]=True
        kept|=k&~d
    last=np.max([r.ends for r in rets]+[c.undropped.ends],axis=0)
    r4=rets[0]
    b=_candidate_boundaries(r4, stored_unless_swapped(r4))
    live=int(stored_unless_swapped(c.undropped, c.fusion.written).max())
    s=condense(c.liveness,c.fusion,c.costs,kept_by_cuts=kept,boundaries=b,last_needed=last,live_bytes=live,smallest_swap=SMALLEST,relayout=c.profile.canonical_layouts,pairs=[(o.id,n.id) for o,n in state_that_may_stay_out(c.undropped)])
    return c,rets,s,time.time()-t0
if __name__=="__main__":
    import sys
    for n in sys.argv[1:]:
        c,rets,s,dt=setup(n)
        print(n,"tensors",len(s.tensors),"nodes",len(s.reads),"bounds",len(s.boundaries),"secs",dt,"base",s.base_bytes/1e6,"small max",s.small_bytes.max()/1e6, "inputs", bin(s.at_begin).count("1"), "unwritten", len(s.tensors)-bin(s.written).count("1"))
