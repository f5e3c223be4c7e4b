// LSTM layers as operators of ours (lstm.cpp).
#pragma once

namespace tarry {

void register_lstm_layers(); // with the recorder, when it knows PyTorch's operators

} // namespace tarry
