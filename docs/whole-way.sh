#!/usr/bin/env bash
# The whole way of a tiny model, in the current folder and without a network: prepare a corpus, train, be killed, resume,
# export, write in transformers, answer tasks of lm-eval. A minute on one core, with `pip install -e '.[eval,hf]'`.
#
#   whole-way.sh TEXTS TASK.yaml,...
set -euo pipefail
texts=$1 tasks=$2
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HOME="$PWD/cache" OMP_NUM_THREADS=1

megacpp data prepare "$texts" --out corpus --vocab-size 400 --validation-fraction 0.1

train() {
  exec megacpp train dense_110m --data.path corpus --run.dir run --run.steps 150 --checkpoint.every 20 \
    --model.dim 64 --model.depth 4 --model.vocab-size 400 --model.attention.num-heads 4 --model.attention.num-kv-heads 2 \
    --model.attention.head-dim 16 --model.mlp.hidden-dim 128 --data.seq-len 128 --train.device-batch-size 8 \
    --train.tokens-per-step 1024 --optim.lr 1e-2 --optim.muon-lr 3e-2 --run.eval-rows 16 --run.sample-tokens 0
}
train &  # until the machine goes down
while [ ! -e run/checkpoints/step-000020 ] && kill -0 $!; do sleep 0.1; done
kill -KILL $!
wait $! || true
(train) | tee resumed.txt

megacpp export run --out exported --dtype fp32

megacpp sample run --prompt '#include' --max-tokens 100 --temperature 0 --json > sampled.json
python > written.txt <<'END'
from transformers import pipeline

generate = pipeline("text-generation", model="exported")
print(generate("#include", max_new_tokens=100, do_sample=False)[0]["generated_text"])
END

megacpp eval run --tasks "$tasks" | tee ours.txt
lm_eval --model hf --model_args pretrained=exported,dtype=float32 --device cpu --tasks "$tasks" --output_path theirs
