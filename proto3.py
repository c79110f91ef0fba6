import pickle, sys, time
from tensile_jax.device_profiles import load_profile
from tensile_jax.plan.analysis.operator_order import order
import tensile_jax.plan.search.step_model as sm_
sm_.PRICES=(4.0,0.8,0.6,0.5,0.42,0.36,0.3,0.26,0.22,0.19,0.165,0.13,0.1,0.05,0.01)
from tensile_jax.plan.search.step_model import StepModel
from tensile_jax.plan.search.search import starting
from tensile_jax.plan.search.local import repair, improve
from tensile_jax.plan.search.choice import *
from tensile_jax.plan.result.build import build_plan, empty_plan
V={"resnet50":(1734214800,2869.518),"vgg16":(2776590638,5506.112),"gpt":(469722940,733.97)}
name,sm,shares=sys.argv[1],sys.argv[2],[float(x) for x in sys.argv[3].split(",")]
g=order(pickle.load(open(f"/tmp/i13/{name}.pkl","rb")))
step=StepModel(g,load_profile("h200"),state_may_stay_out=sm=="any")
W,Vu=V[name]; step.model
for pct in shares:
    for pr in sm_.PRICES[1:]:
        L=W*pct/100
        t=time.process_time(); S=starting(step,step.model,pr,L); t1=time.process_time(); R=repair(S,L,300); t2=time.process_time()
        if R is None: print(pct,pr,"none %.2f %.2f"%(t1-t,t2-t1)); continue
        I=improve(R,L,2000); t3=time.process_time()
        print(f"{pct} {pr} start {S.cost/Vu:.3f} segs {S.count} over {sum(p>L for p in S.peaks)} rep {R.cost/Vu:.3f} ({R.step_us/Vu:.3f}) segs {R.count} imp {I.cost/Vu:.3f} ({I.step_us/Vu:.3f}) re {sum(c.again_us for c in I.contents):.0f} wr {sum(I.written_us):.0f} segs {I.count} | {t1-t:.2f} {t2-t1:.2f} {t3-t2:.2f}",flush=True)
