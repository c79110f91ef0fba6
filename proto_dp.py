from proto_setup import setup
import time, sys, numpy as np
from tensile_jax.plan.search.schedule import Model
from tensile_jax.plan.search.cut import cheapest_cuts
from tensile_jax.plan.search.start import *
from bisect import bisect_right
name=sys.argv[1]
c,rets,s,_=setup(name)
m=Model(s,c.profile)
from tensile_jax.plan.search.choice import whole_peak
from tensile_jax.plan.search.workspace import Measured
w=whole_peak(c,Measured())
print("whole", w)
bit={t:i for i,t in enumerate(s.tensors)}
def node_of(place): return bisect_right(s.starts,place)-1
def coarse(stored,n):
    k=len(s.boundaries)
    if k<=n: return list(range(k))
    parts=np.array_split(np.arange(1,k-1),n-2)
    return [0]+[int(min(p,key=lambda i:s.bytes_of(stored[i]))) for p in parts]+[k-1]
if __name__=="__main__":
  for r,pr in zip(rets,(4.0,0.6,0.36,0.165,0.05,0.01)):
    t=time.time()
    end=last_held(s,{bit[t]:node_of(p) for t,p in r.dropped.items() if t in bit})
    stored=held_at(s,end)
    print(pr,"prep",time.time()-t)
    for pct in (90,60,40,30):
      for n in (48,192):
        t=time.time(); cuts=cheapest_cuts(m,stored,w*pct/100,1.0,coarse(stored,n)); t1=time.time()
        S=start(m,cuts,end)
        if S is None: print(pr,pct,"none"); continue
        print(pr,pct,n,"segs",S.count,"eor %.3f cost %.3f peak %.3f"%(S.step_us/c.whole_us,S.cost/c.whole_us,S.peak/w),"dp %.2fs start %.3fs"%(t1-t,time.time()-t1), "ev",m.evaluated, "over", sum(p>w*pct/100 for p in S.peaks))
