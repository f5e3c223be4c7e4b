"""Fine-tuning a causal language model, as tutorials of transformers do it."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler, set_seed

set_seed(42)
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")

config = GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
model.to(device)

data = [{"input_ids": ids, "labels": ids.clone()} for ids in torch.randint(1, 97, (24, 16))]
train_dataloader = DataLoader(data, shuffle=True, batch_size=8)

num_epochs = 2
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
total = num_epochs * len(train_dataloader)
lr_scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=1, num_training_steps=total)

model.train()
for epoch in range(num_epochs):
    for batch in train_dataloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        print(f"epoch {epoch} loss {loss.item():.4f} lr {lr_scheduler.get_last_lr()[0]:.2e}")

model.eval()
prompt = torch.tensor([[5, 6, 7]], device=device)
with torch.no_grad():
    generated = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
print(generated[0].tolist())
