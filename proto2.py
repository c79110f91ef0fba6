import pickle, sys, time
from tensile_jax.device_profiles import load_profile
from tensile_jax.plan.analysis.operator_order import order
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan.search.search import fastest, least
from tensile_jax.plan.search.choice import *
from tensile_jax.plan.result.build import build_plan, empty_plan
from tensile_jax.plan.result.check import check
from dataclasses import replace
V={"resnet50":(1734214800,2869.518),"vgg16":(2776590638,5506.112),"gpt":(469722940,733.97)}
name,sm,shares=sys.argv[1],sys.argv[2],[float(x) for x in sys.argv[3].split(",")]
g=order(pickle.load(open(f"/tmp/i13/{name}.pkl","rb")))
t=time.time()
step=StepModel(g,load_profile("h200"),state_may_stay_out=sm=="any")
m=Measured()
w=whole_peak(step,m)
W,Vu=V.get(name,(w,step.whole_us))
F=least(step,m); 
print(name,sm,"whole",w,"one seg",one_segment_bytes(step.model),"floor %.3f"%(F.peak/W),"prep %.2f"%(time.time()-t), "nodes",len(step.model.step.reads),"tensors",len(step.model.step.tensors))
def show(S,tag,limit):
    t=time.time(); c=choice_of(step,S); t1=time.time()
    p=build_plan(c.layout,step.liveness,[n for n,_ in workspaces_of(S)],step.costs,replace(empty_plan(g),state_memory=sm))
    t2=time.time()
    try: check(p,g); ok="ok"
    except Exception as e: ok=repr(e)
    print(f"   {tag} plan eor {p.step_us/Vu:.3f} sched {S.step_us/Vu:.3f} peak {p.peak_bytes/W:.4f} sched {S.peak/W:.4f} re {p.recomputed_us:.0f}/{sum(c.again_us for c in S.contents):.0f} stall {p.stall_us:.0f} swaps {p.swapped_out_bytes/1e6:.0f}/{p.swapped_in_bytes/1e6:.0f} segs {len(p.segments)} check {ok} choice {t1-t:.2f} build {t2-t1:.2f}",flush=True)
show(F,"floor",0)
for pct in shares:
    t=time.time(); S=fastest(step,W*pct/100,m)
    if S is None: print(pct,None); continue
    print(f"{pct} cost {S.cost/Vu:.3f} {time.time()-t:.2f}s ev {step.model.evaluated}")
    show(S,"",W*pct/100)
