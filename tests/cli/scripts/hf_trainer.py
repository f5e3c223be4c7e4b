"""transformers' Trainer, which chooses the device by itself."""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

set_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
model = BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes))
tokens = torch.randint(64, (24, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": int(row[0] > 32)} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    settings = {"logging_steps": 2, "eval_strategy": "epoch", "save_strategy": "epoch", "learning_rate": 1e-2}
    arguments = TrainingArguments(
        folder, num_train_epochs=2, per_device_train_batch_size=4, report_to="none", disable_tqdm=True, **settings
    )
    trainer = Trainer(model, arguments, train_dataset=data[:16], eval_dataset=data[16:])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    for entry in trainer.state.log_history:
        print({name: value for name, value in entry.items() if name in ("loss", "grad_norm", "eval_loss")})
    resumed = Trainer(model, arguments, train_dataset=data[:16], eval_dataset=data[16:])
    resumed.remove_callback(PrinterCallback)
    resumed.train(resume_from_checkpoint=True)
    print(resumed.evaluate()["eval_loss"])
